"""A character-level GPT that learns to write Python from Python's own standard library.

`python examples/char_gpt.py` trains for a few minutes on two cores (less on a GPU) and then writes some code.
The text is that of the modules beside the interpreter, so nothing is downloaded.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import leyden as L
from leyden.callbacks import LearningRateMonitor, ModelCheckpoint


class Characters(Dataset):
    """Every window of ``context + 1`` characters that starts at a multiple of ``stride``."""

    def __init__(self, codes, context, stride):
        self.codes, self.context, self.stride = codes, context, stride

    def __len__(self):
        return (len(self.codes) - self.context - 1) // self.stride + 1

    def __getitem__(self, index):
        window = self.codes[index * self.stride :][: self.context + 1]
        return window[:-1], window[1:]


class StandardLibrary(L.LightningDataModule):
    def __init__(self, context=128, batch_size=16, megabytes=4.0):
        super().__init__()
        self.save_hyperparameters()
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        # ASCII only: 98 symbols are enough for code, and one byte is one character.
        self.text = text.encode("ascii", errors="ignore")[: int(megabytes * 1e6)]
        self.symbols = sorted(set(self.text))

    def setup(self, stage):
        place = torch.zeros(256, dtype=torch.long)
        place[torch.tensor(self.symbols)] = torch.arange(len(self.symbols))
        codes = place[torch.tensor(list(self.text))]
        context, cut = self.hparams.context, int(len(codes) * 0.95)
        self.train_data = Characters(codes[:cut], context, stride=context // 2)
        self.val_data = Characters(codes[cut:], context, stride=context)

    def train_dataloader(self):
        return DataLoader(self.train_data, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_data, batch_size=self.hparams.batch_size)


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each with its residual."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = split.unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(L.LightningModule):
    def __init__(self, symbols, context=128, width=128, depth=4, heads=4, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.symbol = nn.Embedding(len(symbols), width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(symbols)))

    def forward(self, codes):
        x = self.symbol(codes) + self.position.weight[: codes.shape[1]]
        return self.head(self.blocks(x))

    def loss(self, batch):
        codes, following = batch
        return F.cross_entropy(self(codes).flatten(0, 1), following.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_bits_per_char", loss / math.log(2))

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        steps, warmup = self.trainer.estimated_stepping_batches, 100

        def scale(step):  # up in a line, down in a cosine to a tenth
            progress = min(1.0, step / steps)
            return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def write(self, start, length, temperature=0.8):
        """Continues ``start`` by ``length`` characters, each drawn from the prediction for it."""
        place = {symbol: index for index, symbol in enumerate(self.hparams.symbols)}
        codes = torch.tensor([[place[byte] for byte in start.encode("ascii")]], device=self.device)
        for _ in range(length):
            logits = self(codes[:, -self.hparams.context :])[0, -1] / temperature
            codes = torch.cat([codes, torch.multinomial(logits.softmax(-1), 1)[None]], dim=1)
        return bytes(self.hparams.symbols[code] for code in codes[0].tolist()).decode("ascii")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--megabytes", type=float, default=4.0, help="how much of the library's text to use")
    parser.add_argument("--write", type=int, default=400, help="characters to write at the end")
    arguments = parser.parse_args()

    L.seed_everything(0)
    data = StandardLibrary(megabytes=arguments.megabytes)
    model = CharGPT(symbols=data.symbols)
    trainer = L.Trainer(
        devices=1,
        max_steps=arguments.steps,
        val_check_interval=min(500, arguments.steps),
        check_val_every_n_epoch=None,
        limit_val_batches=50,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()],
    )
    trainer.fit(model, datamodule=data)

    best = CharGPT.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).eval()
    print(best.write("def ", arguments.write))
