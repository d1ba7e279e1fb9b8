"""The small model of SkyMemory, a folder that transformers loads; ``ORIGIN.txt`` says what it was trained on."""
