"""What engines and router have above themselves: a small engine behind the OpenAI protocol, to try and test with."""
