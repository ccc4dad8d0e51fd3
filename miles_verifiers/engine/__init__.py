"""SGLang: the CPU platform, the server process, new weights. The only room that imports sglang."""
