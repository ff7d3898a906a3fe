"""Models and tokenizers in Hugging Face's formats, both ways."""
