"""Ways in for those who come from elsewhere. Each module needs the extra of its name.

===============================  =====================  ========================================
module                           extra                  for
===============================  =====================  ========================================
:mod:`dpbam.interop.opacus`      ``opacus``             going on from a training with Opacus
:mod:`dpbam.interop.lightning`   ``lightning``          a LightningModule and Lightning's Trainer
:mod:`dpbam.interop.huggingface` ``transformers``       Hugging Face's Trainer, LoRA included
===============================  =====================  ========================================

All of them end in one :class:`~dpbam.oracle.PrivateGradientOracle` and one
:class:`~dpbam.privacy.ledger.Ledger`: what an epsilon means does not depend on the way in.
"""
