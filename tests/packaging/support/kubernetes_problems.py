"""All that is wrong with the recipes for Kubernetes."""

from tests.packaging.support.kubernetes_actors import problems_of_actors
from tests.packaging.support.kubernetes_parts import problems_of_parts
from tests.packaging.support.kubernetes_pods import problems_of_pod
from tests.packaging.support.kubernetes_recipes import Recipes


def problems(recipes: Recipes) -> list[str]:
    """List what would keep the pods from starting, meeting, sampling, being counted or leaving."""
    found = problems_of_actors(recipes)
    for name in recipes.names:
        found += problems_of_pod(recipes, name)
    if "nyala-broker" in recipes.names:
        found += problems_of_parts(recipes)
    return found
