"""Tensor parallelism: the ranks of an axis compute each layer together (Shoeybi et al., 2019, "Megatron-LM").

A *region* is a module, such as attention or a feed-forward network, whose first linear layers are split by columns
(each rank computes some of the outputs, such as some heads) and whose last layer is split by rows (each rank computes a
partial sum of the output).  Only the boundaries of a region communicate:

              outside             enter a region           leave a region
    default   complete copies     identity                 all-reduce
    sequence  shards of tokens    all-gather               reduce-scatter

The backward pass runs the transposed collectives.  With `sequence=True`, normalization, dropout and residual
connections process a shard of the tokens (Korthikanti et al., 2022, "Reducing Activation Recomputation in Large
Transformer Models").

Inside a region, each rank's gradient of a replicated parameter is a partial sum.  Outside, gradients are equal on all
ranks, or partial sums with `sequence=True`.  The layouts declare which case applies, and the engine sums partial
gradients accordingly.

`RULES` describes the region of each kind of module; `register` adds a rule for another model's modules:

    register(MyAttention, Rule(column={"qkv": my_parts}, row={"out": my_heads}))

The token embedding and the output projection are split along the vocabulary (`ParallelVocabulary`).  With targets, no
rank holds the logits of the whole vocabulary.  Without targets, the model gathers and returns the logits of the whole
vocabulary or, within `sharded_logits`, returns the logits of this rank's part.
"""

from farandole.parallel.tensor.apply import apply as apply
from farandole.parallel.tensor.rules import Indivisible, Parts, Rule, register
from farandole.parallel.tensor.vocabulary import sharded_logits

__all__ = ["Indivisible", "Parts", "Rule", "register", "sharded_logits"]
