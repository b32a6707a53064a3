"""A policy that says what a script says, behind the API of a vLLM or SGLang server."""
