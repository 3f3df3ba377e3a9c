"""An exported folder on a hub: text and tensors only, with the card that the export wrote."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from draftsmith.train.export.proof import safe


def push(folder: Path, repo: str, public: bool = False) -> str:
    """Upload what `draftsmith export` wrote -> its address; the repository is made, private unless `public`, where there is none."""
    if not (folder / "README.md").is_file() or not [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]:
        raise ValueError(f"{folder} is no exported draft (a README.md and weights are in one); draftsmith export RECIPE writes it")
    safe(folder)
    api = HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A draft, exported by Draftsmith"))
    except HfHubHTTPError as error:
        raise OSError(
            f"the hub did not take {folder} as {repo}: {str(error).strip().splitlines()[0]}. A token comes from `hf auth login`, or HF_TOKEN"
        ) from error
