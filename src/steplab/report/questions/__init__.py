"""Records as answers to questions: `rows` has what may be asked for, `answers` finds what answers."""
