"""Between agents and model servers: protocols, engines, exact tokens, records."""
