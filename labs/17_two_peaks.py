# %% [markdown]
# # 17. Two peaks and one Gaussian
#
# **Question:** Why does a student that learns from its own samples differ from one that imitates its teacher's?
#
# **Goal.** Fit one Gaussian to a teacher with two peaks, by the reverse KL on the student's own
# samples and by the forward KL on the teacher's. See where each student ends, and that the sampled
# gradient of the reverse KL is right on average.
#
# **Chapter:** distillation.
#
# **Time:** 3 seconds.

# %%
import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from tether.algorithms.distillation import DIVERGENCES
from tether.api.labs import Lab, line

lab = Lab("17_two_peaks")
torch.manual_seed(lab.seed)
STEPS = 600
START = 1.5
PLACES = torch.tensor([-2.0, 2.0])
teacher = MixtureSameFamily(
    Categorical(torch.tensor([0.6, 0.4])),
    Normal(PLACES, torch.tensor([0.5, 0.5])),
)
grid = torch.linspace(-6, 6, 481)
width = float(grid[1] - grid[0])

# %% [markdown]
# ## The two directions
#
# The student has a mean and a width. KL(student, teacher) is an average over the student's own
# samples: it costs much to write what the teacher would not write, and nothing to leave something
# out. KL(teacher, student) is an average over the teacher's samples: it costs much to leave out what
# the teacher writes. The words of a vocabulary are 481 places on a line here, and the divergences are
# the ones that `[distill]` descends.


# %%
def words_of(density: Tensor) -> Tensor:
    """(1, places) log-probabilities of the places."""
    return density.log_softmax(-1)[None]


theirs = words_of(teacher.log_prob(grid))


def fitted(kind: str, start: float, beta: float = 0.5) -> tuple[float, float, list[float]]:
    """Mean and width after the training, and the divergence by step."""
    mean = torch.tensor(start, requires_grad=True)
    log_width = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([mean, log_width], lr=0.02)
    course = []
    for _ in range(STEPS):
        own = words_of(Normal(mean, log_width.exp()).log_prob(grid))
        gap = DIVERGENCES[kind](own, theirs, beta).sum()
        optimizer.zero_grad()
        gap.backward()
        optimizer.step()
        course.append(float(gap.detach()))
    return float(mean.detach()), float(log_width.detach().exp()), course


students = {
    "reverse KL": fitted("reverse", START),
    "reverse KL, from the left": fitted("reverse", -START),
    "forward KL": fitted("forward", START),
    "halfway (jsd)": fitted("jsd", START),
}

# %%
lab.plot(
    "One Gaussian for two peaks",
    [
        line(teacher.log_prob(grid).exp().tolist(), "teacher", grid.tolist()),
        *(
            line(Normal(mean, spread).log_prob(grid).exp().tolist(), name, grid.tolist())
            for name, (mean, spread, _) in students.items()
        ),
    ],
    x="place",
    y="density",
    look_at="the reverse KL takes the peak that it is near; the forward KL covers both, and the valley.",
    leads=True,
)


def in_valley(mean: float, spread: float) -> float:
    """The share of a student's samples between the peaks, where the teacher has next to none."""
    own = Normal(mean, spread)
    return float(own.cdf(torch.tensor(1.0)) - own.cdf(torch.tensor(-1.0)))


lab.table(
    ["student", "mean", "width", "samples in the valley", "divergence at the end, nats"],
    [
        [name, mean, spread, in_valley(mean, spread), course[-1]]
        for name, (mean, spread, course) in students.items()
    ],
)
shares = teacher.log_prob(grid).exp()
inside = (grid > -1) & (grid < 1)
lab.text(f"{float(shares[inside].sum() * width):.1%} of the teacher's samples lie in the valley.")

# %% [markdown]
# ## From samples alone
#
# A teacher on a server gives one number for each token that the student wrote. The gradient of
# log-ratio times log-probability over such samples is that of the reverse KL on average. So the
# student needs no vocabulary, only more samples.


# %%
def slope(samples: int) -> Tensor:
    """The gradient with respect to the mean, from samples."""
    mean = torch.tensor(0.5, requires_grad=True)
    own = Normal(mean, torch.tensor(1.0))
    drawn = own.sample((samples,))
    gaps = (own.log_prob(drawn) - teacher.log_prob(drawn)).detach()
    return torch.autograd.grad((gaps * own.log_prob(drawn)).mean(), mean)[0]


mean = torch.tensor(0.5, requires_grad=True)
own = words_of(Normal(mean, torch.tensor(1.0)).log_prob(grid))
exact = float(torch.autograd.grad(DIVERGENCES["reverse"](own, theirs, 1.0).sum(), mean)[0])
few, many = (torch.stack([slope(size) for _ in range(400)]) for size in (16, 256))
lab.table(
    ["", "gradient", "deviation of one estimate"],
    [
        ["over the vocabulary", exact, 0.0],
        ["16 samples", float(few.mean()), float(few.std())],
        ["256 samples", float(many.mean()), float(many.std())],
    ],
)

# %%
right, left = students["reverse KL"], students["reverse KL, from the left"]
covering = students["forward KL"]
average = float((shares * grid).sum() * width)
spread = float((shares * (grid - average).square()).sum() * width) ** 0.5
lab.expect("place of the reverse KL's student", right[0], 1.9, 2.1, "theory: a peak of the teacher")
lab.expect("the same from the left", left[0], -2.1, -1.9, "theory: a peak of the teacher")
lab.expect(
    "mean of the forward KL's student",
    covering[0],
    average - 0.05,
    average + 0.05,
    "theory: the teacher's mean",
)
lab.expect(
    "its width", covering[1], spread - 0.05, spread + 0.05, "theory: the teacher's deviation"
)
lab.expect(
    "its samples in the valley",
    in_valley(*covering[:2]),
    0.3,
    0.5,
    "theory: those of that Gaussian",
)
lab.expect(
    "error of the sampled gradient, in its own error",
    abs(float(many.mean()) - exact) / (float(many.std()) / 20),
    0.0,
    4.0,
    "theory: unbiased",
)
lab.expect(
    "deviation at 16 over that at 256 samples", few.std() / many.std(), 3.4, 4.6, "theory: 4"
)

# %% [markdown]
# **Question to try.** Start nearer to the middle, at 0.5 (`START`). Why does the student of the
# reverse KL stay in the valley then, and what would it need to see a peak?

# %%
lab.finish(
    "On its own samples a student learns to write only what its teacher would write, and one of its ways is enough. "
    "Imitating the teacher's samples it covers all of them, and what lies between. The first needs no text of the teacher, "
    "only its opinion.",
)
