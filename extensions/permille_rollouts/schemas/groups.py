"""Groups of devices, and the rules that select their members."""

from typing import ClassVar

from pydantic import Field

from permille.schemas.devices import AgentVersion
from permille.schemas.fields import Closed, Count, Examples, Id, Name, Timestamp
from permille.schemas.runs import EngineName
from permille_rollouts.offer import MAX_MEMBERS


class GroupRule(Closed):
    """Conditions of a group. A device belongs to the group if it meets all conditions that are given."""

    # The signed record lists a digest of each member, so the number of members is limited.
    devices: list[Id] = Field(default=[], max_length=MAX_MEMBERS, description="ids of the devices")
    tags: list[Name] = Field(default=[], max_length=20, description="the device has one of these tags")
    agent_version: AgentVersion | None = Field(default=None, description="lowest version of the agent")
    engines: list[EngineName] = Field(
        default=[], max_length=len(EngineName), description="one of these engines computed the newest run"
    )
    memory_bytes: Count = Field(default=0, description="least memory of the device")


class GroupCreate(Closed):
    """A named group. Without any condition it contains all devices."""

    examples: ClassVar[Examples] = {
        "devices with a tag": {"name": "canaries", "rule": {"tags": ["canary"]}},
        "devices with 4 GiB": {"name": "large", "rule": {"memory_bytes": 4294967296}},
    }

    name: Name
    rule: GroupRule = GroupRule()


class DeviceGroup(GroupCreate):
    """A group as operators see it."""

    id: Id
    devices: Count = Field(description="number of devices that belong to the group now")
    created_at: Timestamp


class TagsPut(Closed):
    """The new tags of a device."""

    examples: ClassVar[Examples] = {"two tags": {"tags": ["canary", "kitchen"]}, "no tags": {"tags": []}}

    tags: list[Name] = Field(max_length=20)


class DeviceTags(TagsPut):
    """A device and its tags."""

    device_id: Id


class FactsPut(Closed):
    """Facts that a device reports, by which groups select devices."""

    examples: ClassVar[Examples] = {
        "a device with 8 GB": {
            "agent_version": "0.1.0",
            "engine": "light",
            "memory_bytes": 8_000_000_000,
            "tags": ["kitchen"],
        }
    }

    agent_version: AgentVersion
    engine: EngineName | None
    memory_bytes: Count | None
    # These tags are kept apart from those of operators, so that neither side can remove the other's tags.
    tags: list[Name] = Field(default=[], max_length=20, description="tags that the device's owner has set")
