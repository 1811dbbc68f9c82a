"""What a training step of ``many_devices`` sends and holds on each device, counted from its rules.

``python step_on_paper.py`` prints the table of ``docs/parallel_70b.md`` for a model of 70 billion
weights.  The same functions, for small models, are held to compiled programs by the tests.
"""

from typing import NamedTuple

from tiny_transformer import Config


class Mesh(NamedTuple):
    """Devices along each axis."""

    data: int = 1
    model: int = 1
    sequence: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.model * self.sequence


def weights(config: Config, mesh: Mesh) -> int:
    """On one device: the pairs of products split over model, the embedding and biases whole."""
    split, width = mesh.model, config.width
    kv = config.kv_heads * config.head_width
    columns = (width + 1) * (width + 2 * kv + 2 * config.hidden) // split
    rows = (width + config.hidden) * width // split + 2 * width
    head = (width + 1) * -(-config.vocabulary // split)
    return config.vocabulary * width + config.layers * (columns + rows) + head


def state(config: Config, mesh: Mesh, full: int = 4) -> int:
    """Bytes of weights and AdamW's two means, which data and sequence do not split."""
    return 3 * full * weights(config, mesh)


def sent(
    config: Config, mesh: Mesh, batch: int, steps: int, half: int = 4, full: int = 4
) -> dict[str, int]:
    """Bytes of the results of each kind of collective on one device, in one step.

    ``half`` is the width of activations and weights' gradients, ``full`` that of sums.
    """
    rows = batch // mesh.data * (steps // mesh.sequence)
    reduced = moved = 0
    if mesh.model > 1:
        forward, back = rows * config.width * full, rows * config.width * half
        reduced += 2 * config.layers * (forward + back)  # a pair of products, and its gradient
        reduced += back + 3 * rows * full  # before the head; three numbers a row of the loss
    if mesh.data * mesh.sequence > 1:
        reduced += weights(config, mesh) * half + full
    if mesh.sequence > 1:
        part = rows * config.kv_heads // mesh.model * config.head_width * 2  # of keys and values
        there, home = mesh.sequence - 1, mesh.sequence - 1
        again = mesh.sequence - 2  # the last part is kept
        moved = config.layers * part * ((there + again) * half + home * full)
    kinds = {"all-reduce": reduced, "collective-permute": moved}
    return {kind: count for kind, count in kinds.items() if count}


LARGE = Config(128256, width=8192, layers=80, heads=64, kv_heads=8, hidden=28672)
STEPS = 8192  # tokens of a sequence for each device along it
MESHES = (Mesh(1, 8, 1), Mesh(1, 8, 8), Mesh(8, 8, 8))


def table() -> str:
    """One sequence for each device along data; activations in bfloat16, sums in float32."""
    lines = [
        "| devices | data, model, sequence | tokens a step | weights | weights and AdamW | "
        "all-reduced | ring |",
        "|---|---|---|---|---|---|---|",
    ]
    for mesh in MESHES:
        tokens = STEPS * mesh.sequence
        found = sent(LARGE, mesh, mesh.data, tokens, half=2)
        row = (
            f"{mesh.devices} | {mesh.data}, {mesh.model}, {mesh.sequence}",
            f"{mesh.data * tokens:,}",
            f"{weights(LARGE, mesh) / 1e9:.2f}e9",
            *(
                f"{size / 2**30:.1f} GiB"
                for size in (
                    state(LARGE, mesh),
                    found["all-reduce"],
                    found.get("collective-permute", 0),
                )
            ),
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
