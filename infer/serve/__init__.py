"""An HTTP server that speaks OpenAI's protocol over one engine."""
