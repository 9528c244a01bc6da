"""Private training with other libraries. Each module needs the extra in its row.

===============================  =====================  ========================================
module                           extra                  for
===============================  =====================  ========================================
:mod:`dpbam.interop.opacus`      ``opacus``             continuing a training with Opacus
:mod:`dpbam.interop.lightning`   ``lightning``          a LightningModule and Lightning's Trainer
:mod:`dpbam.interop.huggingface` ``transformers``       Hugging Face's Trainer, LoRA included
===============================  =====================  ========================================

All of them use one :class:`~dpbam.oracle.PrivateGradientOracle` and one
:class:`~dpbam.privacy.ledger.Ledger`, so an epsilon means the same in each.
"""
