"""What engines and router have above themselves: a small engine behind the OpenAI protocol, and a client of any."""
