"""Records as answers to questions: `rows` makes rows of them, `answers` chooses and shows."""
