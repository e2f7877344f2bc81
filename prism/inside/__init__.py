"""What happens inside a model: recordings of any quantity, the figures of the paper's appendix, the page that plays."""

from prism.inside.recording import Recording, record, recording

__all__ = ["Recording", "record", "recording"]
