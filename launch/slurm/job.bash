# Sourced by the scripts beside it. run_recipe PROFILE RECIPE [OPTION ...] starts the recipe on all
# nodes of the job. When the job's time is nearly up (USR1, from --signal), or somebody asks
#     scancel --batch --signal=USR1 JOB
# the recipe stops with a checkpoint, and the job is queued again and goes on from there.
#
# DRAFTSMITH_PROFILE names another profile, DRAFTSMITH_PROCESSES how many processes a node has; by
# default one for each of its GPUs.
# shellcheck shell=bash

# Seconds that a launcher leaves its processes to finish a step and write: less than --signal says.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}"

run_recipe() {
    local profile="${DRAFTSMITH_PROFILE:-$1}" recipe="$2"
    shift 2
    local each="${DRAFTSMITH_PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}"
    local options=(
        --num_processes "$((SLURM_JOB_NUM_NODES * each))"
        --main_process_port "$((20000 + SLURM_JOB_ID % 20000))" # several jobs may share a node
    )
    if ((SLURM_JOB_NUM_NODES > 1)); then
        # "standard" keeps DeepSpeed from opening ssh connections of its own: SLURM has already
        # started a launcher everywhere.
        options+=(
            --num_machines "$SLURM_JOB_NUM_NODES"
            --main_process_ip "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
            --deepspeed_multinode_launcher standard
        )
    fi

    local stopping="" status=0 step
    # Signals go to the launchers and their processes; none of them is the batch script.
    trap 'trap "" USR1; stopping=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
    # srun does not take this from sbatch since SLURM 22.05.
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
    # One launcher a node. SLURM_NODEID exists only inside srun, hence the shell.
    # shellcheck disable=SC2016
    srun --kill-on-bad-exit=1 bash -c '
        exec draftsmith launch "$0" --machine_rank "$SLURM_NODEID" "$@"
    ' "$profile" "${options[@]}" "$recipe" "$@" &
    step=$!
    wait "$step" || status=$?
    if [[ -n "$stopping" ]]; then # it was the signal that ended the wait
        status=0
        wait "$step" || status=$?
        if [[ "$status" != 0 ]]; then
            echo "stopped with status $status: queueing job $SLURM_JOB_ID again"
            scontrol requeue "$SLURM_JOB_ID"
        fi
    fi
    return "$status"
}
