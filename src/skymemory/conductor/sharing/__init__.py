"""State that replicas of a router share: what each has sent to which server. No I/O."""
