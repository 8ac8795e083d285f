"""What goes through a folder: a whole run, and groups that a curator takes home (I1, I3, I5, I11)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from buffer.run.run import Run
from tests.buffer.histories.server_moves import ServerMoves
from tests.buffer.histories.settings_moves import SettingsMoves


class FolderMoves(ServerMoves, SettingsMoves):
    def save_and_resume(self, is_copied: bool) -> None:
        """The run goes on as another one, or over the emptied key space: what ran was handed back."""
        running = self.at("running")
        with TemporaryDirectory() as folder:
            assert sorted(self.scene.rest()) == sorted(group.gid for group in running)
            assert self.scene.run.save(Path(folder, "run")).run == self.scene.name
            if not is_copied:
                self.scene.raw.flushall()
            name = f"{self.scene.name}-copy" if is_copied else None
            self.move_to(Run.restore(self.scene.store, Path(folder, "run"), name=name))
        for group in running:
            group.stage = "waiting"
            group.lane = "resume"
            group.token = ""
            group.tries = group.tries - 1
        self.old_producers.append(self.scene.producer)
        self.scene.open_producer()
        self.reopen(self.committed)
        self.check_everything()

    def move_to(self, run: Run) -> None:
        scene = self.scene
        scene.run = run
        scene.name = run.name
        scene.keys = run.keys
        self.store.run = run.name
        self.moments.clear()
        # who worked is not saved
        scene.nonces.clear()

    def export_and_import(self, task: str, limit: int) -> None:
        self.lift_marks()
        chosen = sorted(self.at("completed", task), key=lambda group: group.gid)[:limit]
        if not chosen:
            return
        with TemporaryDirectory() as folder:
            path = Path(folder, "groups.jsonl")
            gids = [group.gid for group in chosen]
            exported = self.scene.run.export(path, where={"gid": {"$in": gids}})
            assert (exported.groups, exported.unreadable) == (len(chosen), {})
            imported = self.scene.run.import_groups(path)
        came = [self.come_in(task, "completed", list(group.made_by)) for group in chosen]
        assert imported.groups == len(chosen)
        assert imported.too_old == sum(group.stage != "completed" for group in came)
