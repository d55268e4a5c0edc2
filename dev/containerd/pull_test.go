package suite

import (
	"os"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
)

// Pulls the image IMAGE as kubelet's and nerdctl's pulls do, with labels for remote snapshotters, on the
// containerd at ADDRESS, into CONTAINERD_NAMESPACE. ctr of containerd 1.6 gives no labels.
func TestPull(t *testing.T) {
	containerd, err := client.New(os.Getenv("ADDRESS"))
	if err != nil {
		t.Fatal(err)
	}
	defer containerd.Close()
	reference := os.Getenv("IMAGE")
	_, err = containerd.Pull(namespaces.WithNamespace(t.Context(), os.Getenv("CONTAINERD_NAMESPACE")), reference,
		client.WithPullUnpack, client.WithPullSnapshotter("burgeon"),
		client.WithImageHandlerWrapper(snapshotters.AppendInfoHandlerWrapper(reference)))
	if err != nil {
		t.Fatal(err)
	}
}
