// containerd's own tests of a snapshotter, against `burgeon snapshotter` over gRPC.
//
//	BURGEON=…/burgeon SUITE_NAME=overlayfs suite.test -test.root -test.v
//
// Each test has a process and a root of its own. SUITE_NAME is the name under which containerd's
// tests know what to excuse: overlayfs cannot rename directories of lower layers.
package suite

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// The longest start of a process, on a loaded machine.
const startLimit = 30 * time.Second

func TestSuite(t *testing.T) {
	testsuite.SnapshotterSuite(t, os.Getenv("SUITE_NAME"), start)
}

// Starts a snapshotter below root; the returned function ends it.
func start(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
	return startWith(root, filepath.Join(root, "state"))
}

func startWith(root, state string, options ...string) (snapshots.Snapshotter, func() error, error) {
	// The suite's own folders may be too long for the address of a socket.
	folder, err := os.MkdirTemp("/tmp", "burgeon-suite")
	if err != nil {
		return nil, nil, err
	}
	socket := filepath.Join(folder, "s")
	arguments := []string{"--state-dir", state, "--config", "none", "snapshotter",
		"--root", filepath.Join(root, "snapshots"), "--socket", socket}
	command := exec.Command(os.Getenv("BURGEON"), append(arguments, options...)...)
	var said bytes.Buffer
	command.Stderr = &said
	if err := command.Start(); err != nil {
		return nil, nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	if err := listens(socket, ended); err != nil {
		_ = command.Process.Kill()
		_ = os.RemoveAll(folder)
		return nil, nil, fmt.Errorf("%w: %s", err, said.String())
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	end := func() error {
		_ = command.Process.Kill()
		<-ended
		_ = os.RemoveAll(folder)
		return connection.Close()
	}
	return proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "burgeon"), end, nil
}

// Waits until somebody listens at the socket.
func listens(socket string, ended <-chan error) error {
	for limit := time.Now().Add(startLimit); time.Now().Before(limit); {
		select {
		case err := <-ended:
			return fmt.Errorf("the snapshotter ended: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
		if connection, err := net.Dial("unix", socket); err == nil {
			return connection.Close()
		}
	}
	return fmt.Errorf("nobody listens at %s", socket)
}
