"""Export to CTranslate2, Hugging Face and ONNX; import Hugging Face Marian and Pegasus models."""
