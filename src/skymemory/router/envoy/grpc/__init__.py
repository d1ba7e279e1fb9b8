"""The part of gRPC that the endpoint picker needs."""
