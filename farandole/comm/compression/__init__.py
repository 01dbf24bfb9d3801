"""Compression of gradients between hosts, for links that are slower than memory.

    compressor = Int8().for_tensor(gradients.numel())
    for step in ...:
        comm.all_reduce(gradients, "avg", compression=compressor)

Within a host, values are reduced exactly.  Between hosts, each leader rank reduces a share of the values, and
compresses its messages.  With error feedback, the compression error of a message is added to the next message for the
same values, so values are delayed but not lost.

F. Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel distributed training of
speech DNNs (2014).  S. P. Karimireddy et al.: Error feedback fixes SignSGD and other gradient compression schemes
(2019).
"""

from __future__ import annotations

from farandole.comm.compression.base import Compression, Compressor
from farandole.comm.compression.codecs import Cast, Int8
from farandole.comm.compression.low_rank import PowerSGD
from farandole.comm.compression.names import compression_named
from farandole.comm.compression.sparse import TopK

__all__ = ["Cast", "Compression", "Compressor", "Int8", "PowerSGD", "TopK", "compression_named"]
