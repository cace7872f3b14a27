"""A head's outputs as prefix acceptance of the draft under way."""

import pytest
import torch

from eval.drafting.stopping import DraftedToken
from eval.drafting.stopping.logistic import OnlineLogistic, sigmoid
from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance
from eval.rounds import Round
from heads import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead
from heads.inputs import under_way

WIDTH = 8


def immediate() -> ImmediateHead:
    """A random head whose logits lie where outcomes tell most of them, about 1."""
    torch.manual_seed(6)
    head = ImmediateHead(hidden_size=WIDTH, width=8, depth=1).eval()
    torch.nn.init.normal_(head.output.weight)
    torch.nn.init.constant_(head.output.bias, 1.5)
    return head


def tokens(count: int) -> list[DraftedToken]:
    generator = torch.Generator().manual_seed(1)
    q = torch.rand(count, 5, generator=generator).softmax(dim=-1)
    states = torch.randn(count, WIDTH, generator=generator)
    embeddings = torch.randn(5, WIDTH, generator=generator)
    return [
        DraftedToken(place % 5, q[place], states[place], embeddings.__getitem__)
        for place in range(count)
    ]


@pytest.mark.parametrize("head", [immediate(), ConfidenceHead(hidden_size=WIDTH)], ids=type)
def test_every_token_counts_as_the_head_judges_it_when_it_is_drawn(head: BaseHead) -> None:
    drafted = tokens(5)
    of_draft, of_token = PrefixAcceptance(head), PrefixAcceptance(head, cumulative=False)
    for _ in range(2):  # a second round starts afresh
        of_draft.begin()
        of_token.begin()
        product = 1.0
        for token in drafted:
            accept = sigmoid(float(head.logits(under_way(token)).detach()))
            product *= accept
            assert of_draft.after(token, newest=0.5) == pytest.approx(product)
            assert of_token.after(token, newest=0.5) == pytest.approx(accept)


def test_specdecs_head_is_one_token_late_and_its_bias_is_undone_only_if_asked() -> None:
    torch.manual_seed(2)
    head, drafted = AcceptanceHead(hidden_size=WIDTH, depth=1, rejection_weight=6.0), tokens(4)
    for calibrated in (False, True):
        prefix_acceptance, product = PrefixAcceptance(head, calibrated=calibrated), 1.0
        for place, token in enumerate(drafted):
            if place:
                raw = float(torch.sigmoid(head(token.state).detach()))
                product *= 6 * raw / (1 - raw + 6 * raw) if calibrated else raw
            assert prefix_acceptance.after(token, newest=0.5) == pytest.approx(product * 0.5)


def test_a_head_is_recalibrated_by_the_accepted_tokens_and_the_first_that_was_not() -> None:
    """What follows a rejected token is never judged by the target, and nothing is learned of it."""
    for refit in (True, False):
        head, known = immediate(), OnlineLogistic((0.0, 1.0))
        prefix_acceptance = PrefixAcceptance(head, refit=refit)
        for accepted in (0, 4, 2, 6, 1):
            prefix_acceptance.begin()
            for place, token in enumerate(tokens(6)):
                prefix_acceptance.after(token)
                logit = float(head.logits(under_way(token)).detach())
                if refit and place <= accepted:
                    known.observe(logit, place < accepted)
            prefix_acceptance.observe(Round(6, 6, accepted, accepted + 1, 6, 0.0, 0.0, 0.0))
        model = prefix_acceptance.model
        assert (model.intercept, model.slope) == pytest.approx((known.intercept, known.slope))
        assert (model.slope != 1.0) == refit
