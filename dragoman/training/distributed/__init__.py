"""Data-parallel and sharded (FSDP) training over several processes."""
