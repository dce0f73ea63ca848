"""What the plug-ins of SGLang and vLLM share."""
