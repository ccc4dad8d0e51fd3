"""The bridge between renderers' `POST /inference/v1/generate` and SGLang's `/generate`."""
