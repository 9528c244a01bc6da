"""What a model is trained for: one file per task, with its loss, metrics, predictions and words.

Outputs z of the model, K classes or findings, y the target of a record, w class weights, gamma of
the focal loss (Lin et al. 2017):

=============  ==============================================  ====================================
task           loss of one record                              metrics, the main one first
=============  ==============================================  ====================================
single-label   w_y (1 - p_y)^gamma (-log p_y), p = softmax z   accuracy
multi-label    mean over the findings of the same, p =         macro AUC, micro AUC, macro and micro
               sigmoid z; w applies to records that have it    average precision
regression     (z - s(y))^2, s maps a public range to [-1, 1]  R2, MAE, Spearman's correlation
segmentation   mean over the pixels of single-label's          Dice, IoU: means over the classes
                                                               except the first, the background
=============  ==============================================  ====================================

A loss depends on one record alone and is computed before the clip, so weights and focal loss change
no sensitivity. Dice and IoU of a class are taken over all pixels of a set together. A task is added
by its entry in :data:`dpbam.catalogue.TASKS`.
"""
