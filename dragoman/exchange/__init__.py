"""Doors to other programs: models go out to CTranslate2, Hugging Face and ONNX, and Marian models come in."""
