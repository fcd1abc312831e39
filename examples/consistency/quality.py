"""How good generated digits are, in the eyes of a classifier that was trained on the real ones."""

import functools

import numpy as np
import sklearn.neural_network
import threadpoolctl

from consistency.data import Digits

# Threads only get in each other's way on matrices as small as these.
single_thread = functools.partial(threadpoolctl.threadpool_limits, limits=1)


class Judge:
    """A perceptron with one hidden layer; the hidden layer's activations are the features that are compared."""

    def __init__(self, train: Digits, held_out: Digits, seed: int = 0):
        classifier = sklearn.neural_network.MLPClassifier(
            hidden_layer_sizes=(128,), alpha=1e-2, learning_rate_init=3e-3, max_iter=500, random_state=seed
        )
        with single_thread():
            self.classifier = classifier.fit(_flatten(train.images), train.labels)
        self.reference = self.features(train.images)
        self.sample_size = len(held_out.labels)

    def features(self, images: np.ndarray) -> np.ndarray:
        return np.maximum(_flatten(images) @ self.classifier.coefs_[0] + self.classifier.intercepts_[0], 0)

    def __call__(self, digits: Digits) -> dict[str, float]:
        """The share of digits taken for the class asked for, and the Frechet distance to the training digits."""
        with single_thread():
            return {
                "class_agreement": float(self.classifier.score(_flatten(digits.images), digits.labels)),
                "frechet_distance": self.frechet_distance(digits.images),
            }

    def frechet_distance(self, images: np.ndarray) -> float:
        """Between Gaussians fitted to the features of `images` and to those of the training digits.

        A smaller sample lies farther away whatever its quality. So it is the mean over samples that are as large as
        the held-out set, whose own distance is then comparable.
        """
        features = np.random.default_rng(0).permutation(self.features(images))
        samples = max(1, len(features) // self.sample_size)
        return float(np.mean([frechet_distance(part, self.reference) for part in np.array_split(features, samples)]))


def frechet_distance(features: np.ndarray, reference: np.ndarray) -> float:
    """‖μ₁ − μ₂‖² + tr(C₁ + C₂ − 2 (C₁^½ C₂ C₁^½)^½), with μ and C the means and covariances."""
    difference = features.mean(0) - reference.mean(0)
    covariance, reference_covariance = np.cov(features, rowvar=False), np.cov(reference, rowvar=False)
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ reference_covariance @ root), 0)).sum()
    return float(difference @ difference + np.trace(covariance) + np.trace(reference_covariance) - 2 * cross)


def _flatten(images: np.ndarray) -> np.ndarray:
    return np.asarray(images, np.float64).reshape(len(images), -1)
