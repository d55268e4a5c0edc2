package suite

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"github.com/containerd/errdefs"
)

// containerd's own tests again, over a remote layer without entries: each snapshot without a parent is
// made above it. CHAIN, IMAGE, MANIFEST and LAYER name the layer as containerd's labels do, STATE is a
// state directory that may claim it, and CONTAINERS is the form of the containers above it.
func TestRemote(t *testing.T) {
	testsuite.SnapshotterSuite(t, os.Getenv("SUITE_NAME"), startRemote)
}

func startRemote(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	state := os.Getenv("STATE")
	all, end, err := startWith(root, state, "--containers", os.Getenv("CONTAINERS"))
	if err != nil {
		return nil, nil, err
	}
	unmount := func() error {
		mounts, err := filepath.Glob(filepath.Join(root, "snapshots", "chains", "*"))
		if err != nil {
			return err
		}
		for _, path := range mounts {
			command := exec.Command(os.Getenv("BURGEON"), "--state-dir", state, "--config", "none", "umount", "--lazy", path)
			// The cleaner of the snapshotter may have been faster.
			_ = command.Run()
		}
		return end()
	}
	labels := map[string]string{
		"containerd.io/snapshot.ref":                 os.Getenv("CHAIN"),
		"containerd.io/snapshot/cri.image-ref":       os.Getenv("IMAGE"),
		"containerd.io/snapshot/cri.manifest-digest": os.Getenv("MANIFEST"),
		"containerd.io/snapshot/cri.layer-digest":    os.Getenv("LAYER"),
	}
	if _, err = all.Prepare(ctx, "claim", "", snapshots.WithLabels(labels)); !errdefs.IsAlreadyExists(err) {
		_ = unmount()
		return nil, nil, errors.Join(errors.New("the chain was not claimed"), err)
	}
	return &above{all, os.Getenv("CHAIN")}, unmount, nil
}

// Makes snapshots without a parent above the chain, and hides that.
type above struct {
	snapshots.Snapshotter
	chain string
}

func (a *above) parent(name string) string {
	if name == "" {
		return a.chain
	}
	return name
}

func (a *above) hidden(info snapshots.Info) snapshots.Info {
	if info.Parent == a.chain {
		info.Parent = ""
	}
	return info
}

func (a *above) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	return a.Snapshotter.Prepare(ctx, key, a.parent(parent), opts...)
}

func (a *above) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	return a.Snapshotter.View(ctx, key, a.parent(parent), opts...)
}

func (a *above) Stat(ctx context.Context, key string) (snapshots.Info, error) {
	info, err := a.Snapshotter.Stat(ctx, key)
	return a.hidden(info), err
}

func (a *above) Update(ctx context.Context, info snapshots.Info, paths ...string) (snapshots.Info, error) {
	info, err := a.Snapshotter.Update(ctx, info, paths...)
	return a.hidden(info), err
}

func (a *above) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	hidden := slices.Clone(filters)
	for i := range hidden {
		hidden[i] = strings.ReplaceAll(hidden[i], `parent!=""`, `parent!="`+a.chain+`"`)
	}
	return a.Snapshotter.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		if info.Name == a.chain {
			return nil
		}
		return fn(ctx, a.hidden(info))
	}, hidden...)
}
