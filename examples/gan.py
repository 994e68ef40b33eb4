"""Manual optimisation: two networks that train against each other (a GAN) to draw digits.

`python examples/gan.py` trains for about twenty seconds on two cores, draws a few in the terminal, and logs more of
them to TensorBoard.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leyden as L


def drawing(image):
    """Eight rows of text for one 8x8 image; a character is half as wide as high, so each pixel is two of them."""
    shades = " .:-=+*#%@"
    return ["".join(shades[int(value * 9)] * 2 for value in row) for row in image.view(8, 8)]


def layers(*sizes, norm, last):
    """Linear layers; between them whatever ``norm`` makes, and a leaky ReLU."""
    hidden = []
    for inputs, outputs in itertools.pairwise(sizes[:-1]):
        hidden += [nn.Linear(inputs, outputs), norm(outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(*sizes[-2:]), last)


class GAN(L.LightningModule):
    def __init__(self, latent=32, width=128, lr=5e-4):
        super().__init__()
        self.save_hyperparameters()
        # Two optimizers take turns inside one training_step, so this module calls backward and step itself.
        self.automatic_optimization = False
        self.generator = layers(latent, width, width, 64, norm=nn.BatchNorm1d, last=nn.Sigmoid())
        self.discriminator = layers(64, width, width, 1, norm=lambda _: nn.Dropout(0.3), last=nn.Identity())
        self.register_buffer("fixed_noise", torch.randn(32, latent))

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        noise = torch.randn(len(real), self.hparams.latent, device=self.device)

        # The discriminator learns to tell drawings from digits; the generator only supplies them here.
        self.toggle_optimizer(discriminator_optimizer)
        verdict_real = self.discriminator(real)
        verdict_fake = self.discriminator(self(noise).detach())
        discriminator_loss = (F.softplus(-verdict_real).mean() + F.softplus(verdict_fake).mean()) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        # The generator learns to be taken for the real thing.
        self.toggle_optimizer(generator_optimizer)
        generator_loss = F.softplus(-self.discriminator(self(noise))).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.log_dict({"d_loss": discriminator_loss, "g_loss": generator_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        if self.logger is not None and self.current_epoch % 10 == 0:
            images = self(self.fixed_noise).view(4, 8, 8, 8).permute(0, 2, 1, 3).reshape(1, 32, 64)
            self.logger.experiment.add_image("drawings", images, self.current_epoch)

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (0.5, 0.999)
        generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [generator_optimizer, discriminator_optimizer]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=150)
    arguments = parser.parse_args()

    L.seed_everything(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    trainer = L.Trainer(devices=1, max_epochs=arguments.epochs, log_every_n_steps=10)
    model = GAN()
    trainer.fit(model, DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True))

    model.eval()
    with torch.no_grad():
        drawn = [drawing(image) for image in model(model.fixed_noise[:4])]
    for lines in zip(*drawn):
        print("   ".join(lines))
