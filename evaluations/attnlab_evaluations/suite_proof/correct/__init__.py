"""Correct variants: no check of the suite may fail on any of them.

The textbook ones are plain, in small steps of which each mutant overrides one; the others do something unusual.
Each is written as a stranger would write a plugin: a formula from a paper, honest capabilities, a definition of
its own where the formula is its own. Each stands for a kind: a normaliser that is no softmax, a slot that is
no key, positions inside the score, a random draw, pooled keys, one dtype, one head, no backward. A failure on
one of these is a false alarm, a fault of the suite. Needs torch; for tests and for curious readers.
"""

from __future__ import annotations

from attnlab import Attention
from attnlab_evaluations.suite_proof.correct.fixed import (
    FixedGaussianAttention,
    ProjectedValuesAttention,
    RandomSynthesizerAttention,
    RateByGroupAttention,
    ValueEmbeddingAttention,
)
from attnlab_evaluations.suite_proof.correct.foreign import GatedWeightsAttention, HandwrittenAttention, ListsAttention
from attnlab_evaluations.suite_proof.correct.heads import (
    MultiQueryAttention,
    SingleHeadAttention,
    TalkingHeadsAttention,
    Wide16Attention,
)
from attnlab_evaluations.suite_proof.correct.kernels import (
    ChannelwiseAttention,
    DifferentialAttention,
    PolynomialAttention,
)
from attnlab_evaluations.suite_proof.correct.limits import (
    Float64Attention,
    ForwardOnlyAttention,
    HalfAttention,
    PlainCallAttention,
    WindowAttention,
)
from attnlab_evaluations.suite_proof.correct.normalisers import (
    EntmaxAttention,
    HardAttention,
    SigmoidAttention,
    SparsemaxAttention,
    TopKAttention,
)
from attnlab_evaluations.suite_proof.correct.null_slots import NullSlotAttention, SoftmaxOneAttention
from attnlab_evaluations.suite_proof.correct.placed import BucketedBiasAttention
from attnlab_evaluations.suite_proof.correct.pooled import (
    BlockMeansAttention,
    EfficientAttention,
    ProjectedLengthAttention,
)
from attnlab_evaluations.suite_proof.correct.remembering import (
    PinnedMemoryAttention,
    RingAttention,
    RunningMeanAttention,
)
from attnlab_evaluations.suite_proof.correct.required import (
    CausalSquareAttention,
    DampedAttention,
    FixedWindowAttention,
    RoundedAttention,
    ShortDelta,
    SinkhornAttention,
)
from attnlab_evaluations.suite_proof.correct.sampled import SampledAttention
from attnlab_evaluations.suite_proof.correct.scores import (
    EuclideanAttention,
    GaussianPlaceAttention,
    LearnedTemperatureAttention,
)
from attnlab_evaluations.suite_proof.correct.sums import (
    GatedDeltaAttention,
    LinearSumAttention,
    RandomExponentialAttention,
    RandomReluAttention,
)
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_scores import (
    TextbookAdditive,
    TextbookAlibi,
    TextbookConcat,
    TextbookCosine,
    TextbookDistance,
    TextbookDot,
    TextbookLocal,
    TextbookLocation,
    TextbookLuong,
    TextbookRelative,
    TextbookRotary,
)
from attnlab_evaluations.suite_proof.correct.textbook_sums import (
    TextbookChunked,
    TextbookChunkedDelta,
    TextbookCosformer,
    TextbookGatedDelta,
    TextbookMaps,
)
from attnlab_evaluations.suite_proof.correct.textbook_tiled import TextbookTiled

__all__ = ["CORRECT"]

CORRECT: tuple[type[Attention], ...] = (
    TextbookAttention,
    TextbookLinear,
    TextbookDelta,
    TextbookTiled,
    TextbookChunked,
    TextbookGatedDelta,
    TextbookChunkedDelta,
    TextbookMaps,
    TextbookCosformer,
    TextbookDot,
    TextbookAdditive,
    TextbookLuong,
    TextbookConcat,
    TextbookLocation,
    TextbookCosine,
    TextbookDistance,
    TextbookLocal,
    TextbookRelative,
    TextbookAlibi,
    TextbookRotary,
    LearnedTemperatureAttention,
    EuclideanAttention,
    GaussianPlaceAttention,
    BucketedBiasAttention,
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
    SinkhornAttention,
    DampedAttention,
    CausalSquareAttention,
    FixedWindowAttention,
    ShortDelta,
    RoundedAttention,
)
