"""Groups of devices, and what they are chosen by."""

from pydantic import Field

from permille.fleet.offer import MAX_MEMBERS
from permille.schemas.devices import AgentVersion
from permille.schemas.fields import Closed, Count, Id, Name, Timestamp
from permille.schemas.runs import EngineName


class GroupRule(Closed):
    """Conditions of a group. A device belongs to it if it meets all that are given."""

    devices: list[Id] = Field(default=[], max_length=MAX_MEMBERS, description="these devices, by id")
    tags: list[Name] = Field(default=[], max_length=20, description="that have one of these tags")
    agent_version: AgentVersion | None = Field(default=None, description="the lowest version of the agent")
    engines: list[EngineName] = Field(
        default=[], max_length=len(EngineName), description="whose newest run one of these computed"
    )
    memory_bytes: Count = Field(default=0, description="with at least so much memory")


class GroupCreate(Closed):
    """A group under a name. Without any condition it is of all devices."""

    name: Name
    rule: GroupRule = GroupRule()


class DeviceGroup(GroupCreate):
    """A group as operators see it."""

    id: Id
    devices: Count = Field(description="that belong to it now")
    created_at: Timestamp


class TagsPut(Closed):
    """Tags of a device."""

    tags: list[Name] = Field(max_length=20)


class DeviceTags(TagsPut):
    """A device and its tags."""

    device_id: Id


class FactsPut(Closed):
    """Facts that a device reports, which groups select by."""

    agent_version: AgentVersion
    engine: EngineName | None
    memory_bytes: Count | None
    tags: list[Name] = Field(default=[], max_length=20, description="that the device's owner has set")
