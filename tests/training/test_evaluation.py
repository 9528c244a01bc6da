import torch
from torch import nn

from dpbam.data import load, to_float
from dpbam.params import evaluating
from dpbam.training.evaluation import predict_logits


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(64, 10)

    def forward(self, x):
        return self.linear(self.drop(x.flatten(1)))


def test_all_records_in_order_whatever_the_batch():
    model, test = Model(), load("digits", split="test")
    logits, labels = predict_logits(model, test, rows=100)
    images, expected = test.batch(torch.arange(len(test)))
    model.eval()
    assert torch.allclose(logits, model(to_float(images)).detach(), atol=1e-5)
    assert torch.equal(labels, expected)


def test_every_module_keeps_its_mode():
    model = Model()
    model.linear.eval()
    with evaluating(model):
        assert not model.drop.training
    assert (model.training, model.drop.training, model.linear.training) == (True, True, False)
