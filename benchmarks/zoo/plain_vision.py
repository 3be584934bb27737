"""Plain models of images and points: convolutions, codes of autoencoders, fields, sets of points."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.batches import CLASSES, Batch, cross_entropy, digits
from benchmarks.zoo.plain_parts import WIDTH, fixed, generator, given, mean_squared, mlp, plain, wide
from benchmarks.zoo.registry import ZooModel

SIZE, IMAGES = 16, 16


def grey(number: int, rows: int = IMAGES) -> Batch:
    """Digits in one channel, with their classes."""
    found = digits(number, rows=rows, size=SIZE)
    return Batch((found.args[0][:, :1].contiguous(),), target=found.target)


def itself(number: int) -> Batch:
    """Digits, which are to be found again."""
    image = grey(number).args[0]
    return Batch((image,), target=image)


def flat(number: int) -> Batch:
    """Digits as rows, which are to be found again, 256 of them."""
    rows = grey(number, 256).args[0].flatten(1)
    return Batch((rows,), target=rows)


def with_noise(number: int, rows: int = 256, width: int = 32) -> Batch:
    """Digits as rows, and noise: what a model draws is a part of its batch."""
    image = grey(number, rows).args[0].flatten(1)
    return Batch((image, torch.randn(rows, width, generator=generator(number + 1))), target=image)


def convolution(n: int, m: int, stride: int = 1) -> nn.Sequential:
    """A 3 x 3 convolution with its norm and activation."""
    return nn.Sequential(nn.Conv2d(n, m, 3, stride, 1), nn.GroupNorm(8, m), nn.SiLU())


class UNet(nn.Module):
    """Down twice, up twice, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down1, self.down2 = convolution(1, 32), convolution(32, 64, 2), convolution(64, 128, 2)
        self.middle = nn.Linear(128, 128)
        self.up1, self.up2, self.last = convolution(192, 64), convolution(96, 32), nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.down1(a)
        c = self.middle(self.down2(b).movedim(1, -1)).movedim(-1, 1)
        d = self.up1(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.last(self.up2(torch.cat([F.interpolate(d, scale_factor=2.0), a], 1)))


class ConvNet(nn.Module):
    """Convolutions with batch norms, and a head of two linears."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n, m in ((1, 32), (32, 64)):
            layers += [nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU(), nn.MaxPool2d(2)]
        self.body, self.hidden, self.out = (
            nn.Sequential(*layers),
            nn.Linear(64 * 16, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(self.body(x).flatten(1))))


class VAE(nn.Module):
    """A mean and a variance, a draw from noise of the batch, and what is decoded from it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(SIZE * SIZE, WIDTH, 64), mlp(32, WIDTH, SIZE * SIZE)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        found = self.decode(mean + noise * (0.5 * log_variance).exp())
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return (wide(found) - x).square().sum(-1).mean() + wide(divergence)


class VQVAE(nn.Module):
    """The nearest code of a book, with a straight-through gradient (van den Oord et al. 2017)."""

    def __init__(self, codes: int = 64) -> None:
        super().__init__()
        self.encode, self.decode = mlp(SIZE * SIZE, WIDTH, WIDTH), mlp(WIDTH, WIDTH, SIZE * SIZE)
        self.book = nn.Embedding(codes, 32)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).unflatten(-1, (4, 32))
        near = torch.cdist(z.detach().float(), self.book.weight.detach().float()).argmin(-1)
        code = self.book(near)
        found = self.decode((z + (code - z).detach()).flatten(1))
        return F.mse_loss(wide(found), x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned around: both players of a game learn from one loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class GAN(nn.Module):
    """A generator and a discriminator of rows, in one step by ``Reverse``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(32, WIDTH, SIZE * SIZE)
        self.discriminator = mlp(SIZE * SIZE, WIDTH, 1)

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = Reverse.apply(torch.tanh(self.generator(noise)))
        return F.softplus(wide(self.discriminator(fake))).mean() + F.softplus(-wide(self.discriminator(real))).mean()


class DCGAN(nn.Module):
    """The same game with convolutions and their transposes."""

    def __init__(self) -> None:
        super().__init__()
        up = [nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)]
        self.first, self.up = nn.Linear(32, 64 * 16), nn.Sequential(*up)
        self.down = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2)
        )
        self.last = nn.Linear(64 * 16, 1)

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = torch.tanh(self.up(self.first(noise).unflatten(-1, (64, 4, 4))))
        real = real.unflatten(-1, (1, SIZE, SIZE))
        scores = [self.last(self.down(x).flatten(1)) for x in (Reverse.apply(fake), real)]
        return F.softplus(wide(scores[0])).mean() + F.softplus(-wide(scores[1])).mean()


class NeRF(nn.Module):
    """Density and colour along rays from encoded positions (Mildenhall et al. 2020)."""

    def __init__(self, bands: int = 8) -> None:
        super().__init__()
        self.bands, self.body, self.out = bands, mlp(6 * bands, WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, points: Tensor) -> Tensor:
        angles = points[..., None] * 2.0 ** torch.arange(self.bands)
        x = torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)
        colour, density = self.out(F.relu(self.body(x))).float().split([3, 1], -1)
        opaque = 1 - torch.exp(-F.softplus(density[..., 0]) / points.shape[1])
        through = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque[:, :-1] + 1e-6], 1), 1)
        return ((opaque * through)[..., None] * colour.sigmoid()).sum(1)


def rays(number: int, rows: int = 64, steps: int = 16) -> Batch:
    """Points along rays through a cube, and the colour that each ray sees."""
    source = generator(number)
    start, direction = (torch.randn(rows, 1, 3, generator=source) for _ in range(2))
    points = start + torch.linspace(0, 1, steps)[:, None] * direction
    return Batch((points,), target=torch.sigmoid(start[:, 0] @ fixed(3, 3)))


class PointNet(nn.Module):
    """A function of each point, the largest over points, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = mlp(3, 64, WIDTH, WIDTH), mlp(WIDTH, 64, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.whole(self.each(points).amax(1))


def clouds(number: int, rows: int = 16, points: int = 64) -> Batch:
    """Points on ellipsoids, whose axes are the class's."""
    source = generator(number)
    target = torch.randint(CLASSES, (rows,), generator=source)
    sphere = F.normalize(torch.randn(rows, points, 3, generator=source), dim=-1)
    return Batch((sphere * fixed(CLASSES, 3).exp()[target][:, None],), target=target)


class Siamese(nn.Module):
    """Two views by one network, each to the other's (InfoNCE)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(SIZE * SIZE, 256, WIDTH, 64)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        a, b = (F.normalize(wide(self.body(x)), dim=-1) for x in (one, other))
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def views(number: int, rows: int = 128) -> Batch:
    """Each digit twice, with noise of its own."""
    image, source = grey(number, rows).args[0].flatten(1), generator(number + 1)
    return Batch(tuple(image + 0.3 * torch.randn(image.shape, generator=source) for _ in range(2)))


class Style(nn.Module):
    """A transfer network whose result has the Gram matrices of a style (Johnson et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.transfer = nn.Sequential(convolution(1, 32), nn.Conv2d(32, 1, 3, padding=1))
        self.seen = nn.Sequential(convolution(1, 32), convolution(32, 64, 2)).requires_grad_(False)

    def forward(self, image: Tensor, style: Tensor) -> Tensor:
        found, wanted = (self.seen(x).flatten(2) for x in (self.transfer(image), style))
        grams = [wide(x @ x.transpose(1, 2) / x.shape[-1]) for x in (found, wanted)]
        content = F.mse_loss(wide(found), wide(self.seen(image).flatten(2)))
        return content + F.mse_loss(grams[0], grams[1].detach())


def styled(number: int) -> Batch:
    """Digits, and one pattern as their style."""
    image = grey(number).args[0]
    return Batch((image, fixed(1, 1, SIZE, SIZE).expand_as(image).contiguous()))


_squared = functools.partial(plain, batch=flat, loss=mean_squared)

MODELS: tuple[ZooModel, ...] = (
    plain("unet", UNet, itself, mean_squared),
    plain("convnet", ConvNet, functools.partial(grey, rows=64), cross_entropy),
    _squared("autoencoder", lambda: mlp(SIZE * SIZE, WIDTH, 32, WIDTH, SIZE * SIZE)),
    plain("vae", VAE, with_noise, given),
    plain("vq_vae", VQVAE, lambda number: Batch(flat(number).args), given),
    plain("gan", GAN, with_noise, given),
    plain("dcgan", DCGAN, functools.partial(with_noise, rows=16), given),
    plain("nerf", NeRF, rays, mean_squared),
    plain("pointnet", PointNet, clouds, cross_entropy),
    plain("siamese", Siamese, views, given),
    plain("style_transfer", Style, styled, given),
)
