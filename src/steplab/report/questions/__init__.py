"""Answers questions from records: `rows` tabulates the records, `answers` selects rows and words the answer."""
