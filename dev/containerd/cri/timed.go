package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The interval of looks at a container that is not ready yet.
const look = 2 * time.Millisecond

// Seconds of each call of a pod's start. A kubelet makes the sandbox before it pulls the image.
type times struct {
	Pod       string  `json:"pod"`
	Container string  `json:"container"`
	Sandbox   float64 `json:"sandbox"`
	Pull      float64 `json:"pull"`
	Create    float64 `json:"create"`
	Start     float64 `json:"start"`
	// From the start of the process until the program is ready.
	Ready float64 `json:"ready"`
}

// A pod of one container, and what it says when it is ready: nothing if it is ready when it ends.
type timedPod struct {
	name, image, user, ready string
	command                  []string
	pulls                    bool
}

// Starts the pod and measures it.
func (c client) timed(ctx context.Context, one timedPod) error {
	var result times
	begun := time.Now()
	lap := func(of *float64) {
		now := time.Now()
		*of = now.Sub(begun).Seconds()
		begun = now
	}
	pod := podConfig(one.name)
	sandbox, err := c.pods.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: pod})
	if err != nil {
		return err
	}
	result.Pod = sandbox.PodSandboxId
	lap(&result.Sandbox)
	if one.pulls {
		request := cri.PullImageRequest{Image: &cri.ImageSpec{Image: one.image}, SandboxConfig: pod}
		if _, err := c.images.PullImage(ctx, &request); err != nil {
			return err
		}
	}
	lap(&result.Pull)
	config := containerConfig(one.name, one.image, one.command)
	config.Linux.SecurityContext.RunAsUsername = one.user
	container, err := c.pods.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: sandbox.PodSandboxId, SandboxConfig: pod, Config: config,
	})
	if err != nil {
		return err
	}
	result.Container = container.ContainerId
	lap(&result.Create)
	if _, err := c.pods.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: result.Container}); err != nil {
		return err
	}
	lap(&result.Start)
	log := filepath.Join(pod.LogDirectory, config.LogPath)
	if err := c.wait(ctx, result.Container, log, one.ready); err != nil {
		return err
	}
	lap(&result.Ready)
	return json.NewEncoder(os.Stdout).Encode(result)
}

// Waits until the log has the words, or, if there are none, until the container has ended well.
func (c client) wait(ctx context.Context, container, log, ready string) error {
	for {
		said, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		if ready != "" && bytes.Contains(said, []byte(ready)) {
			return nil
		}
		reply, err := c.pods.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: container})
		if err != nil {
			return err
		}
		if status := reply.Status; status.State == cri.ContainerState_CONTAINER_EXITED {
			if ready != "" || status.ExitCode != 0 {
				return fmt.Errorf("the container ended with code %d (%s): %s", status.ExitCode, status.Reason, said)
			}
			return nil
		}
		time.Sleep(look)
	}
}
