"""gRPC, as far as the endpoint picker needs it."""
