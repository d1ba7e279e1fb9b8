"""What verbs do: imported when a verb runs, since its imports take seconds."""
