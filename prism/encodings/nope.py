"""NoPE: no positional encoding at all; causal masking alone tells tokens apart (Kazemnejad et al., 2023)."""

from prism.encodings.encoding import Encoding


class NoPE(Encoding):
    """Overrides nothing."""

    name = "nope"
    summary = "no positional encoding"
    citation = "Kazemnejad et al., The Impact of Positional Encoding on Length Generalization in Transformers, 2023"
    extrapolates = True
