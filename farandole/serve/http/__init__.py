"""HTTP servers with an OpenAI-compatible API for language models and encoders."""
