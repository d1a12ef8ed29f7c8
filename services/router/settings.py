"""What the router reads from its environment. Limits are per process; every one of them bounds memory or time."""

from pathlib import Path

from pydantic import DirectoryPath, Field, FilePath, field_validator

from services.router.keys import NO_KEYS, Keys, read_keys
from shared.model.cost import Coefficients, CoefficientsName, load_coefficients
from shared.runtime.settings import SecretFile, ServiceSettings

BLOCK_KEY_BYTES_MIN = 32


class RouterSettings(ServiceSettings):
    """`VERTUMNUS_*`, see `ServiceSettings`."""

    block_key_file: FilePath = Field(description="the deployment's secret for block ids, 32 bytes or more")
    model_dir: DirectoryPath | None = Field(
        default=None, description="Hugging Face directory with the tokenizer; without one only token ids are served"
    )
    coefficients: CoefficientsName = Field(
        default="qwen3_30b_a3b_h20",
        description="cost model: a set in shared/model/coefficients, or the path of your own (.json)",
    )
    speedup: float = Field(default=1.0, gt=0, le=1_000, description="of a modelled pool, as its workers are set")
    api_key_file: SecretFile | None = Field(
        default=None,
        description="API keys, one a line: KEY, TENANT KEY or TENANT sha256:DIGEST; without the file no key is asked",
    )

    open_requests_max: int = Field(default=1_024, ge=1, le=100_000)
    body_bytes_max: int = Field(default=8 * 2**20, ge=1_024, le=2**30)
    token_buffer_bytes_max: int = Field(
        default=256 * 2**20, ge=2**20, le=2**40, description="prompts held for agents to claim"
    )
    output_tokens_max: int = Field(default=4_096, ge=1, le=1_000_000)
    tokenizer_threads: int = Field(default=2, ge=1, le=64)

    ack_timeout_s: float = Field(default=1.0, gt=0, le=60, description="an agent answers an assignment within this")
    no_worker_wait_s: float = Field(default=5.0, ge=0, le=60, description="how long a request waits for any worker")
    first_token_slack_s: float = Field(
        default=10.0,
        gt=0,
        le=3_600,
        description="on top of twice the predicted TTFT; 30 s more while the worker serves others",
    )
    idle_timeout_s: float = Field(default=30.0, gt=0, le=3_600, description="between two tokens")
    placement_start_s: float = Field(
        default=60.0, gt=0, le=3_600, description="a placement is reported as started or ended within this"
    )
    placement_end_s: float = Field(
        default=600.0, gt=0, le=86_400, description="one that has started is reported as ended within this"
    )
    drain_s: float = Field(default=25.0, ge=0, le=25.0, description="open streams may take this long after SIGTERM")

    @field_validator("block_key_file")
    @classmethod
    def _long_enough(cls, path: Path) -> Path:
        try:
            size = len(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        if size < BLOCK_KEY_BYTES_MIN:
            raise ValueError(f"{path} holds {size} bytes; at least {BLOCK_KEY_BYTES_MIN} are needed")
        return path

    def block_key(self) -> bytes:
        """The deployment's key."""
        return self.block_key_file.read_bytes()

    def cost_model(self) -> Coefficients:
        """The set that decisions begin with."""
        return load_coefficients(self.coefficients).scaled(1 / self.speedup)

    @field_validator("api_key_file")
    @classmethod
    def _readable(cls, path: Path | None) -> Path | None:
        if path is not None:
            try:
                read_keys(path.read_bytes().splitlines())
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return path

    def api_keys(self) -> Keys:
        """The keys that are taken; none if no file is set."""
        return read_keys(self.api_key_file.read_bytes().splitlines()) if self.api_key_file else NO_KEYS
