"""A page that plays what a trained model does with a prompt, live in the browser or as one file that needs nothing.

    prism view RUN                          # a server on this machine, for this machine
    prism view RUN --export page.html       # one file; opens without a network

trace.py makes what is shown (a trace), cursors.py PRISM's part of it; bundle.py puts the prebuilt page together, as a
server hands it out or as one file; protection.py says who may ask, server.py answers.
"""

from prism.view.command import view

__all__ = ["view"]
