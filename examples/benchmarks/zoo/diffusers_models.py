"""Models of diffusers: UNets, transformers that denoise, autoencoders; each is to give back the noise, or the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import Batch, Entry, images


def denoise_loss(output: Any, batch: Batch) -> Tensor:
    return F.mse_loss(output.sample, batch["noise"])


def image_loss(output: Any, batch: Batch) -> Tensor:
    return F.mse_loss(output.sample, batch["sample"])


def noisy(rows: int, channels: int = 4, size: int = 16) -> Batch:
    """Noisy latents, each at a time of its own."""
    return {
        "sample": images(rows, size, channels),
        "timestep": torch.randint(0, 1000, (rows,)),
        "noise": images(rows, size, channels),
    }


def prompted(rows: int) -> Batch:
    return {**noisy(rows), "encoder_hidden_states": torch.randn(rows, 5, 16)}


def patches(rows: int, **more: Tensor) -> Batch:
    batch = {**noisy(rows, 4, 8), **more}
    return {"hidden_states": batch.pop("sample"), **batch}


def labelled(rows: int) -> Batch:
    return patches(rows, class_labels=torch.randint(0, 5, (rows,)))


def described(rows: int) -> Batch:
    return patches(rows, encoder_hidden_states=torch.randn(rows, 5, 16))


def pooled(rows: int) -> Batch:
    return patches(rows, encoder_hidden_states=torch.randn(rows, 5, 16), pooled_projections=torch.randn(rows, 12))


def flux(rows: int) -> Batch:
    """Latents and text as sequences of tokens with places, as Flux takes them."""
    return {
        "hidden_states": torch.randn(rows, 4, 8),
        "encoder_hidden_states": torch.randn(rows, 3, 16),
        "pooled_projections": torch.randn(rows, 12),
        "timestep": torch.rand(rows),
        "img_ids": torch.randn(4, 3),
        "txt_ids": torch.zeros(3, 3),
        "noise": torch.randn(rows, 4, 8),
    }


def pictures(rows: int) -> Batch:
    return {"sample": images(rows, 16)}


class WithControl(nn.Module):
    """A ControlNet in training, and the UNet that it leads."""

    def __init__(self) -> None:
        super().__init__()
        shape = {
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
        }
        down = ("DownBlock2D", "CrossAttnDownBlock2D")
        self.unet = diffusers.UNet2DConditionModel(
            sample_size=16, down_block_types=down, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **shape
        ).requires_grad_(False)
        self.control = diffusers.ControlNetModel(down_block_types=down, conditioning_embedding_out_channels=(4, 8), **shape)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, hint: Tensor) -> Any:
        down, middle = self.control(sample, timestep, encoder_hidden_states, controlnet_cond=hint, return_dict=False)
        return self.unet(
            sample, timestep, encoder_hidden_states, down_block_additional_residuals=down, mid_block_additional_residual=middle
        )


def hinted(rows: int) -> Batch:
    return {**prompted(rows), "hint": images(rows, 32)}


def entry(name: str, model: str, batch: Callable[[int], Batch], loss: Any = denoise_loss, single: bool = False, **options: Any) -> Entry:
    return Entry(f"diffusers/{name}", lambda: getattr(diffusers, model)(**options), batch, loss, single)


UNET: dict[str, Any] = {"sample_size": 16, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
}
CODER: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
CODER |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}

ENTRIES = (
    entry(
        "unet-2d",
        "UNet2DModel",
        noisy,
        in_channels=4,
        out_channels=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **UNET,
    ),
    entry(
        "unet-2d-condition",
        "UNet2DConditionModel",
        prompted,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **UNET,
    ),
    entry("dit", "DiTTransformer2DModel", labelled, num_embeds_ada_norm=5, out_channels=4, norm_num_groups=4, dropout=0.0, **DIT),
    entry(
        "pixart",
        "PixArtTransformer2DModel",
        described,
        caption_channels=16,
        cross_attention_dim=16,
        out_channels=4,
        norm_num_groups=4,
        use_additional_conditions=False,
        num_embeds_ada_norm=1000,
        **DIT,
    ),
    entry(
        "stable-diffusion-3",
        "SD3Transformer2DModel",
        pooled,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
        **DIT,
    ),
    entry(
        "flux",
        "FluxTransformer2DModel",
        flux,
        patch_size=1,
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=12,
        axes_dims_rope=(2, 2, 4),
    ),
    Entry("diffusers/controlnet", WithControl, hinted, denoise_loss),
    entry("autoencoder-kl", "AutoencoderKL", pictures, image_loss, **CODER),
    entry(
        "autoencoder-tiny",
        "AutoencoderTiny",
        pictures,
        image_loss,
        single=True,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        upsampling_scaling_factor=2,
    ),
    entry("vq-model", "VQModel", pictures, image_loss, num_vq_embeddings=16, **CODER),
)
