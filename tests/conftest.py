"""Property tests draw the same examples everywhere, so that a run says something of the change it is for.

To look for new ones: pytest --hypothesis-profile=search
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("repeatable")
