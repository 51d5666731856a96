"""Raw text to piece ids and back."""
