"""Correct variants that do something unusual: no check of the suite may fail on any of them.

Each is written as a stranger would write a plugin: a formula from a paper, honest capabilities, a definition of
its own where the formula is its own. Each stands for a kind: a normaliser that is no softmax, a slot that is
no key, positions inside the score, a random draw, pooled keys, one dtype, one head, no backward. A failure on
one of these is a false alarm, a fault of the suite. Needs torch; for tests and for curious readers.
"""

from __future__ import annotations

from attnlab.conformance.unusual.fixed import (
    FixedGaussianAttention,
    ProjectedValuesAttention,
    RandomSynthesizerAttention,
    RateByGroupAttention,
    ValueEmbeddingAttention,
)
from attnlab.conformance.unusual.foreign import (
    GatedWeightsAttention,
    HandwrittenAttention,
    ListsAttention,
)
from attnlab.conformance.unusual.heads import (
    MultiQueryAttention,
    SingleHeadAttention,
    TalkingHeadsAttention,
    Wide16Attention,
)
from attnlab.conformance.unusual.kernels import (
    ChannelwiseAttention,
    DifferentialAttention,
    PolynomialAttention,
)
from attnlab.conformance.unusual.limits import (
    Float64Attention,
    ForwardOnlyAttention,
    HalfAttention,
    PlainCallAttention,
    WindowAttention,
)
from attnlab.conformance.unusual.normalisers import (
    EntmaxAttention,
    HardAttention,
    SigmoidAttention,
    SparsemaxAttention,
    TopKAttention,
)
from attnlab.conformance.unusual.null_slots import NullSlotAttention, SoftmaxOneAttention
from attnlab.conformance.unusual.placed import AlibiAttention, BucketedBiasAttention, RotaryAttention
from attnlab.conformance.unusual.pooled import (
    BlockMeansAttention,
    EfficientAttention,
    ProjectedLengthAttention,
)
from attnlab.conformance.unusual.remembering import (
    PinnedMemoryAttention,
    RingAttention,
    RunningMeanAttention,
)
from attnlab.conformance.unusual.sampled import SampledAttention
from attnlab.conformance.unusual.scores import (
    CosineAttention,
    EuclideanAttention,
    GaussianPlaceAttention,
    LearnedTemperatureAttention,
)
from attnlab.conformance.unusual.sums import (
    GatedDeltaAttention,
    LinearSumAttention,
    RandomExponentialAttention,
    RandomReluAttention,
)
from attnlab.interface import Attention

__all__ = ["UNUSUAL"]

UNUSUAL: tuple[type[Attention], ...] = (
    CosineAttention,
    LearnedTemperatureAttention,
    EuclideanAttention,
    GaussianPlaceAttention,
    AlibiAttention,
    BucketedBiasAttention,
    RotaryAttention,
    SoftmaxOneAttention,
    NullSlotAttention,
    SparsemaxAttention,
    EntmaxAttention,
    TopKAttention,
    HardAttention,
    SigmoidAttention,
    PolynomialAttention,
    DifferentialAttention,
    ChannelwiseAttention,
    SampledAttention,
    BlockMeansAttention,
    ProjectedLengthAttention,
    EfficientAttention,
    TalkingHeadsAttention,
    MultiQueryAttention,
    SingleHeadAttention,
    Wide16Attention,
    Float64Attention,
    HalfAttention,
    WindowAttention,
    ForwardOnlyAttention,
    PlainCallAttention,
    LinearSumAttention,
    RandomReluAttention,
    RandomExponentialAttention,
    GatedDeltaAttention,
    PinnedMemoryAttention,
    RunningMeanAttention,
    RingAttention,
    ListsAttention,
    HandwrittenAttention,
    GatedWeightsAttention,
    RandomSynthesizerAttention,
    FixedGaussianAttention,
    ProjectedValuesAttention,
    ValueEmbeddingAttention,
    RateByGroupAttention,
)
