"""Which experts a forward's rows chose, as a document that figures and studies read: gates in, JSON out, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddtree.errors import UsageError

KIND = "ddtree routing"


def routing_document(layers: Mapping[int, np.ndarray], values: str = "gate weight") -> dict[str, Any]:
    """The document of {layer: gates [experts, tokens]}, zero where not chosen; `values` says what the numbers are."""
    records = [{"layer": int(layer), "gates": np.asarray(gates).tolist()} for layer, gates in layers.items()]
    return {"schema": 1, "kind": KIND, "values": values, "layers": records}


def routing_layers(document: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """What `routing_document` was made of; UsageError for another kind of document, or gates that are no matrix."""
    if document.get("kind") != KIND:
        raise UsageError(f"routing: expected a document of kind {KIND!r}, found {document.get('kind')!r}")
    layers = {}
    for record in document["layers"]:
        try:
            layers[int(record["layer"])] = np.array(record["gates"], float)
        except (TypeError, ValueError):
            raise UsageError(
                "routing: gates must be a list of equal rows of numbers for each layer"
            ) from None
    return layers
