"""Answers questions from records: `rows` tabulates the records, `answers` selects rows and writes the sentences."""
