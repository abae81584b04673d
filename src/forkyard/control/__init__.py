"""What should happen and where: the verbs, and the loop that keeps what should be and what is in step."""
