package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"testing"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Commits the container CONTAINER of IMAGE as the image COMMITTED, as nerdctl does: a layer with its
// changes above those of IMAGE, none of which has to be in the content store.
func TestCommit(t *testing.T) {
	containerd, err := client.New(os.Getenv("ADDRESS"))
	if err != nil {
		t.Fatal(err)
	}
	defer containerd.Close()
	ctx := namespaces.WithNamespace(t.Context(), os.Getenv("CONTAINERD_NAMESPACE"))
	ctx, done, err := containerd.WithLease(ctx, leases.WithRandomID())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = done(ctx) }()
	if err := commit(ctx, containerd); err != nil {
		t.Fatal(err)
	}
}

func commit(ctx context.Context, containerd *client.Client) error {
	store := containerd.ContentStore()
	base, err := containerd.ImageService().Get(ctx, os.Getenv("IMAGE"))
	if err != nil {
		return err
	}
	manifest, err := images.Manifest(ctx, store, base.Target, platforms.Default())
	if err != nil {
		return err
	}
	text, err := content.ReadBlob(ctx, store, manifest.Config)
	if err != nil {
		return err
	}
	var config ocispec.Image
	if err := json.Unmarshal(text, &config); err != nil {
		return err
	}
	snapshotter := containerd.SnapshotService("burgeon")
	layer, err := rootfs.CreateDiff(ctx, os.Getenv("CONTAINER"), snapshotter, containerd.DiffService())
	if err != nil {
		return err
	}
	info, err := store.Info(ctx, layer.Digest)
	if err != nil {
		return err
	}
	id, err := digest.Parse(info.Labels["containerd.io/uncompressed"])
	if err != nil {
		return err
	}
	config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, id)
	manifest.Config, err = write(ctx, store, ocispec.MediaTypeImageConfig, config, nil)
	if err != nil {
		return err
	}
	manifest.Versioned = specs.Versioned{SchemaVersion: 2}
	manifest.MediaType = ocispec.MediaTypeImageManifest
	manifest.Layers = append(manifest.Layers, layer)
	children := append([]ocispec.Descriptor{manifest.Config}, manifest.Layers...)
	target, err := write(ctx, store, manifest.MediaType, manifest, children)
	if err != nil {
		return err
	}
	_, err = containerd.ImageService().Create(ctx, images.Image{Name: os.Getenv("COMMITTED"), Target: target})
	return err
}

// Writes a document that refers to children, which then live as long as it.
func write(ctx context.Context, store content.Store, kind string, document any, children []ocispec.Descriptor) (ocispec.Descriptor, error) {
	text, err := json.Marshal(document)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	labels := map[string]string{}
	for _, child := range children {
		labels["containerd.io/gc.ref.content."+child.Digest.Encoded()[:12]] = child.Digest.String()
	}
	written := ocispec.Descriptor{MediaType: kind, Digest: digest.FromBytes(text), Size: int64(len(text))}
	return written, content.WriteBlob(ctx, store, written.Digest.String(), bytes.NewReader(text), written, content.WithLabels(labels))
}
